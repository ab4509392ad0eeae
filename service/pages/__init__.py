"""The web pages: what the service knows, for people; rendered on the server, no script needed.

How a page is made
------------------
A page is one module, named by its noun, and one template. The module has

1. a *view* with what is shown, and one function that reads it from the database: a mapping, or
   a frozen dataclass where Python reads it too. The rows of a table are dataclasses, whose fields
   are the columns of its CSV. No HTML, no drawing; a clock or a limit comes in as an argument;
2. the route, which takes an actor, builds the view and hands it to ``respond``::

    router = APIRouter()

    @page(router, "/tokens")                     # also /tokens.json and /tokens.csv
    def tokens(request: Request, _: Admin, services: TheServices) -> Response:
        view = tokens_view(services.tokens)
        return respond(request, view, template="tokens.html", rows=Rows(TokenLine, view["tokens"]))

and one line in ``MODULES``. ``respond`` renders the view as HTML, as JSON (every field of it)
and its main table as CSV; ``page(..., csv=False)`` is for a page without a table. ``drawn``
takes SVG that was drawn on the server. A path parameter is written as for FastAPI,
``/certificates/{certificate_id}``. ``view_of`` fills a dataclass from an object or a row.

A form posts to ``@action(router, "/tokens")``. The guard has read the form and checked
its token before the route runs; ``SubmittedForm`` is the form. The route calls the same use
case as the API, then returns ``see_other("/tokens", done="made")``; a form with mistakes is
shown again by ``respond(..., status=422)``. In a template a form has ``method="post"`` and
``{{ csrf() }}`` inside.

Rules for every page
--------------------
- Every route names its guard (``access``, or ``open_to_all``) and has its rows in
  ``tests/service/identity/who_may.txt``, one for each path.
- Templates extend ``base.html`` and take their parts from ``parts.html``: instants, ids,
  badges, copyable text, pagination, empty states. Text is escaped, undefined names are
  errors, and characters that could reorder or hide text are shown as escapes.
- No style or script is inline: the content security policy forbids both. Files come from
  ``static/`` by ``{{ static('affidavit.css') }}``, under a name with their digest.
- Everything works without scripts; htmx only saves a reload. ``fragment=`` of ``respond``
  names the block that an htmx request gets.
- A number has its label, its unit and the kind of bound beside it.
"""

MODULES = (
    "templating",
    "access",
    "overview",
    "audit",
    "tokens",
    "keys",
    "approvals",
    "certificates",
    "certificate",
    "compare",
    "datasets",
    "new_plan",
    "policies",
    "runs",
    "search",
)
