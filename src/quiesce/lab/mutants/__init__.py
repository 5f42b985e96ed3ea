"""The same machines with one guard removed each: what the checker must catch."""

from quiesce.lab.mutants import borrower, lender, pull, ranks, session, transport
from quiesce.lab.mutants.patch import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "borrower", "lender", "pull", "ranks", "session", "transport"]
