from .errors import GuardStop as GuardStop
from .loop import Guard as Guard
from .opacus_run import opacus as opacus
