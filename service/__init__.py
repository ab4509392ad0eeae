"""The HTTP service: plans come in, signed certificates go out and stay.

::

    route  ->  use case  ->  accounting pool   (a killable process that runs ``certify``)
                         ->  signer            (the organisation's key, or a development key)
                         ->  store             (one transaction: certificate, request, log)

A route parses, calls one use case and returns a model. What an ε means is decided below this
room; here it is only stored, and never changed once it is stored.

Wire models. An endpoint is one module in ``routes`` and one line in ``routes.MODULES``::

    router = APIRouter(route_class=JsonRoute)            # service.routing: strict bodies

    class BudgetRequest(RequestModel):                   # service.models: closed and frozen
        noun, guide = "a budget", "docs/ledger.md"       # for error messages
        epsilon: Annotated[Real, Field(gt=0)]

    @router.post("/v1/budgets", status_code=201, responses=problems(404, 409))
    def set_budget(actor: Annotated[Actor, needs(Scope.ADMIN)], services: TheServices,
                   request: BudgetRequest) -> Budget:    # a ResponseModel, or a row to fill it
        return services.ledger_store.set_budget(request, CommandContext.of(actor, ...))

The body is read after authorization, as strictly as a plan. Mistakes in it are 400
``malformed_request`` (``RequestModel.error_code``) with a pointer each, others 422; a
``DomainError`` becomes its own problem. OpenAPI follows from the models and the access rules.
A stored document is returned as raw ``Response`` with its model in ``responses``.
"""
