from .base import Broken as Broken
from .base import Partial as Partial
from .base import Span as Span
from .directives import key_of as key_of
from .documents import LIBRARIES as LIBRARIES
from .documents import imported as imported
from .documents import imported_document as imported_document
from .dp_event import DP_EVENT_REMEDIES as DP_EVENT_REMEDIES
