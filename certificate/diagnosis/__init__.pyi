from .agreement import ClaimedEpsilon as ClaimedEpsilon
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
