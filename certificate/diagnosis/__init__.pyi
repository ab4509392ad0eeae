from .agreement import ClaimedEpsilon as ClaimedEpsilon
from .catalogue import CATALOGUE as CATALOGUE
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
