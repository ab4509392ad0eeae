from .choice import private_halves as private_halves
from .environment import VARIABLE as VARIABLE
