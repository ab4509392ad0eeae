from .loop import Guard as Guard
from .opacus_run import opacus as opacus
from .stopping import GuardStop as GuardStop
