"""HTTP: the application (``app``), its JSON routes (``routes``) and its HTML pages (``pages``).

``dependencies`` builds everything that a request uses, ``access`` says who may, and ``openapi``
completes the API's document.
"""
