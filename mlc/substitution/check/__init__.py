"""Checks certificates of rules again, without any of the code that found them.

``tutorials/guides/checker.md`` is the argument: which facts are accepted, and why that is sound.
"""

from mlc.substitution.check.certificate import check, check_instance, check_proof, check_rule, general_of
from mlc.substitution.check.integers import CertificateError

__all__ = ["CertificateError", "check", "check_instance", "check_proof", "check_rule", "general_of"]
