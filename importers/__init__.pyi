from .directives import directive_key as directive_key
from .documents import LIBRARIES as LIBRARIES
from .documents import import_document as import_document
from .documents import import_file as import_file
from .dp_event import DP_EVENT_REMEDIES as DP_EVENT_REMEDIES
from .partial_plan import BrokenObligation as BrokenObligation
from .partial_plan import PartialPlan as PartialPlan
from .partial_plan import SourceSpan as SourceSpan
