from .case import Mistake as Mistake
from .catalogue import CATALOGUE as CATALOGUE
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
from .readings import ClaimedEpsilon as ClaimedEpsilon
