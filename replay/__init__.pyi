from .driver import replay_command as replay_command
from .driver import run as run
from .errors import ReplayRefused as ReplayRefused
from .marks import lot as lot
from .marks import records as records
from .marks import release as release
from .report import to_text as to_text
