"""The web pages of the service, rendered on the server; no page needs scripts.

How to add a page
-----------------
A page is one module, named after its subject, and one template. The module has

1. a *view* with the data to show, and one function that reads it from the database. A view is a
   mapping, or a frozen dataclass where Python code reads it too. It hands on the stored resources
   and SQL rows as they are: templates read their fields and round and format them with filters. A
   view contains no HTML; clocks and limits are arguments;
2. the route, which takes an actor, builds the view and calls ``respond``::

    router = APIRouter()

    @page(router, "/tokens")
    def tokens(request: Request, _: Admin, services: TheServices) -> Response:
        view = tokens_view(services.tokens)
        return respond(request, view, template="tokens.html")

and one line in ``MODULES``. ``charts`` of ``respond`` are SVGs. Path parameters have FastAPI's
syntax, as in ``/certificates/{certificate_id}``. Programs use the API: a page has no second form.

A form posts to ``@action(router, "/tokens")``. The guard reads the form and checks its token
before the route runs; ``SubmittedForm`` is the form. The route calls the same use case as the API
and returns ``see_other("/tokens", done="made")``, or shows an invalid form again with
``respond(..., status=422)``. In the template, a form has ``method="post"`` and contains
``{{ csrf() }}``.

Rules
-----
- Every route has a guard (``access``, or ``open_to_all``) and a row for each of its paths in
  ``tests/service/identity/who_may.txt``.
- Templates extend ``base.html`` and use the macros of ``parts.html`` for instants, ids, badges,
  copyable text, pagination and empty states. Text is escaped, undefined names are errors, and
  characters that could reorder or hide text are shown as escapes.
- Styles and scripts are never inline: the content security policy forbids both. Templates refer
  to files in ``static/`` by ``{{ static('affidavit.css') }}``, whose name contains their digest.
- Pages work without scripts; htmx only avoids reloads. ``fragment=`` of ``respond`` names the block
  for an htmx request.
- Every number has its label, its unit and the kind of bound beside it.
"""

MODULES = (
    "templating",
    "access",
    "overview",
    "log_page",
    "tokens",
    "keys",
    "approvals",
    "certificates",
    "certificate",
    "compare",
    "datasets",
    "evidence",
    "new_plan",
    "policies",
    "runs",
    "search",
)
