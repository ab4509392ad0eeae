"""A condition that a few ids fulfil, which the database finds first and then looks up.

PostgreSQL joins ``id IN (SELECT ...)`` as it thinks best, and for a thousand of a hundred thousand
rows thinks it best to read the whole table. Of an array it expects few elements, and looks each up
by the index.

>>> from sqlalchemy import column, select
>>> print(any_of(column("id"), select(column("other"))))
id IN (SELECT other)

Reference: PostgreSQL, Row and Array Comparisons, ``expression = ANY (array expression)``.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, ColumnElement, Select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class _AnyOf(FunctionElement[bool]):
    """The construct; its clauses are a column and a subquery."""

    type = Boolean()
    inherit_cache = True


def any_of(column: ColumnElement[Any], query: Select[Any]) -> ColumnElement[bool]:
    """Whether ``column`` is among what ``query`` selects."""
    return _AnyOf(column, query.scalar_subquery())


@compiles(_AnyOf)
def _in(element: _AnyOf, compiler: Any, **options: Any) -> str:
    column, result = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} IN {result}"


@compiles(_AnyOf, "postgresql")
def _any(element: _AnyOf, compiler: Any, **options: Any) -> str:
    column, result = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} = ANY (ARRAY{result})"
