from .asynchronous import AsyncClient as AsyncClient
from .blocking import Client as Client
from .responses import CertificateAnswer as CertificateAnswer
from .responses import Problem as Problem
from .responses import Unreachable as Unreachable
