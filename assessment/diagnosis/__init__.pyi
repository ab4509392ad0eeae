from .catalogue import CATALOGUE as CATALOGUE
from .mistake import Mistake as Mistake
from .readings import ClaimedEpsilon as ClaimedEpsilon
