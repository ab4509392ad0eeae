"""The pages: what the service knows, for people; drawn on the server, no script needed.

How a page is made
------------------
A page is one file, named by its noun, and one template. The file has

1. a *view*: frozen dataclasses with what is shown, and one function that reads them from
   the database. No HTML, no drawing; a clock or a limit comes in as an argument;
2. the route, which asks for an actor, makes the view and hands it to ``answer``::

    router = APIRouter()

    @page(router, "/audit")                      # also /audit.json and /audit.csv
    def audit(
        request: Request,
        actor: Annotated[Actor, page_actor(Scope.AUDIT)],
        services: TheServices,
    ) -> Response:
        view = audit_view(services.engine)
        return answer(request, view, template="audit.html", rows=Rows(Entry, view.entries))

and one line in ``routers``. ``answer`` gives the view as HTML, as JSON (every field of it)
and its main table as CSV; ``page(..., csv=False)`` is for a page without a table. ``drawn``
takes SVG that was drawn on the server. A path with a parameter stands as it would for
FastAPI, ``/certificates/{certificate_id}``.

A form posts to ``@action(router, "/tokens")``. The guard has read the form and checked
its token before the route runs; ``TheForm`` is what was sent. The route calls the same use
case as the API, then returns ``see_other("/tokens", done="made")``; a form with mistakes is
shown again by ``answer(..., status=422)``. In a template a form has ``method="post"`` and
``{{ csrf() }}`` inside.

Rules that hold for every page
------------------------------
- Every route names its guard, ``page_actor`` or ``open_to_all``, and has its rows in
  ``tests/service/identity/who_may.txt``, one for each path.
- Templates extend ``base.html`` and take their parts from ``parts.html``: instants, ids,
  badges, copyable text, links to the next page, empty states. Text is escaped, undefined
  names are errors, and characters that could reorder or hide text are shown as escapes.
- No style or script stands in a page: the policy in ``headers`` forbids both. Files come
  from ``static/`` by ``{{ static('affidavit.css') }}``, under a name with their digest.
- Without scripts everything works; htmx may only spare a reload. ``fragment=`` of
  ``answer`` names the block that an htmx request is answered with.
- A number has its label, unit and what kind of bound it is beside it.
"""
