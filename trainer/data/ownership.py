"""Who owns which record: what a plan bounds, and choices of records that meet the bounds.

A record may belong to several users: the authors of a message, the people in a picture. A plan
then states ``contributions_per_user``, m, and ``users_per_record``, K. Who owns which record is
public, and these functions read nothing else. What they choose is therefore the same for
neighbouring data sets (docs/theorems/group-sampling.md).

>>> users = [["ann", "bob"], ["ann"], ["ann", "cat"], ["cat"]]
>>> count_ownership(users)
Ownership(contributions_per_user=3, users_per_record=2)
>>> choose_records(users, 1), choose_records(users, 2)
([1, 3], [0, 1, 3])

Reference: the greedy choice is Algorithm 1 of arXiv:2503.03622, fewest users first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, NamedTuple


class Ownership(NamedTuple):
    """The most records of a user, and the most users of a record."""

    contributions_per_user: int
    users_per_record: int


class PartOwners(list[Hashable]):
    """The users of a group of records, some of whom own only a part of them.

    Zeroing that part moves the group's clipped sum by up to 2C, as replacing the group does.
    """


def count_ownership(users: Sequence[Any]) -> Ownership:
    """Return the least bounds that a plan may state for records of these ``users``.

    ``users`` has an entry for each of N records: the name of its user, which may be any hashable
    value, or a list or set of names. Rows of an array or a tensor count as lists. Raises
    ``ValueError`` for a record without a user.
    """
    owners = _owners(users)
    records = Counter(chain.from_iterable(owners))
    return Ownership(
        contributions_per_user=max(records.values(), default=0),
        users_per_record=max(map(len, owners), default=0),
    )


def choose_records(users: Sequence[Any], most: int) -> list[int]:
    """Return records of which every user has at most ``most``, in ascending order.

    Records of few users come first, and among them earlier ones. No other record could be added.
    Takes O(E + N log N) for E pairs of a record and a user. Raises ``ValueError`` for a record
    without a user, and if ``most`` is below 1.
    """
    if most < 1:
        raise ValueError(f"most: {most} records of a user; give at least 1.")
    owners = _owners(users)
    full: set[Hashable] = set()
    counts: defaultdict[Hashable, int] = defaultdict(int)
    chosen = []
    for record in sorted(range(len(owners)), key=lambda record: len(owners[record])):
        if full.isdisjoint(owners[record]):
            chosen.append(record)
            for user in owners[record]:
                counts[user] += 1
                if counts[user] == most:
                    full.add(user)
    return sorted(chosen)


def group_records(users: Sequence[Any]) -> tuple[list[list[int]], list[list[Hashable]]]:
    """Assign each record to one of its users, and return the groups and the users of each.

    A group has the records of one user, ascending, and its users are all users of its records. Each
    record goes to that of its users who has most records, so that others are in few groups. With
    groups as sampling units, whose sums are clipped once, the users of the groups are the ``users``
    of ``private``, of ``count_ownership`` and of ``choose_records``. ``private`` refuses plans of
    another adjacency than ``replace_one`` if some own a part of a group (``PartOwners``). Raises
    ``ValueError`` for a record without a user.
    """
    owners = _owners(users)
    records = Counter(chain.from_iterable(owners))
    groups: dict[Hashable, list[int]] = {}
    for record, names in enumerate(owners):
        groups.setdefault(max(names, key=lambda user: records[user]), []).append(record)
    members, users_of = list(groups.values()), []
    for group in members:
        every = list(dict.fromkeys(user for record in group for user in owners[record]))
        whole = all(len(owners[record]) == len(every) for record in group)
        users_of.append(every if whole else PartOwners(every))
    return members, users_of


def _owners(users: Sequence[Any]) -> list[tuple[Hashable, ...]]:
    """Return the users of each record, each once, in the order in which they are named."""
    owners: list[tuple[Hashable, ...]] = []
    # Entries of arrays and tensors are values, not objects of which each is another user.
    for entry in users.tolist() if hasattr(users, "tolist") else users:
        is_plain = isinstance(entry, str | int | list | set) or not hasattr(entry, "tolist")
        names = entry if is_plain else entry.tolist()
        owners.append(tuple(dict.fromkeys(names)) if isinstance(names, list | set) else (names,))
    # A missing value of a table is not equal to itself, and would be a user of its own.
    missing = {user for user in set(chain.from_iterable(owners)) if user != user}
    for record, names in enumerate(owners):
        if not names or (missing and not missing.isdisjoint(names)):
            raise ValueError(f"record {record} has no user. Name one for each record.")
    return owners
