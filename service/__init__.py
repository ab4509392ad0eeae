"""The HTTP service: it certifies plans, and signs and stores the certificates.

::

    route  ->  use case  ->  accounting pool   (a killable process that runs ``certify``)
                         ->  signer            (the organisation's key, or a development key)
                         ->  store             (one transaction: certificate, request, log)

A route parses the request, calls one use case and returns a model. The accounting is in other
rooms; stored numbers never change.

Wire models. An endpoint is one module in ``routes`` and one line in ``routes.MODULES``::

    router = APIRouter(route_class=JsonRoute)            # service.routing: strict bodies

    class BudgetRequest(RequestModel):                   # service.wire_models: closed, frozen
        noun = "a budget"                       # for error messages
        epsilon: Annotated[Real, Field(gt=0)]

    @router.post("/v1/budgets", status_code=201, responses=problems(404, 409))
    def set_budget(actor: Annotated[Actor, needs(Scope.ADMIN)], services: TheServices,
                   request: BudgetRequest) -> Budget:    # a ResponseModel, or a row to fill it
        return services.ledger_store.set_budget(request, CommandContext.of(actor, ...))

Bodies are read after authorization, as strictly as plans. Mistakes in a body are answered with
400 ``malformed_request`` (``RequestModel.error_code``), other mistakes with 422; a ``DomainError``
has its own status and code. OpenAPI is derived from the models and access rules. A stored document
is returned as raw ``Response``, with its model in ``responses``.
"""
