from .catalogue import CATALOGUE as CATALOGUE
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
from .mistake import Mistake as Mistake
from .readings import ClaimedEpsilon as ClaimedEpsilon
