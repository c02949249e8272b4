"""The rules of rights, written as plainly as possible, to compare with."""

import re

from tailrace.core.model.access import Identities


def oracle(identities: Identities, user: str, right: str, resource: str, name: str) -> bool:
    """The rules as somebody would tell them."""
    known = identities.users.get(user)
    if known is None:
        return False
    tenant = user.split("/")[0] if "/" in user else None
    if tenant is not None and (resource == "broker" or not name.startswith(f"{tenant}/")):
        return False
    if known.administrator:
        return True
    if resource == "topic":
        name = re.sub(r"(?<=.)(\.dlq)+$", "", name)
    if resource != "broker" and name.startswith("_"):
        reads = resource == "topic" and right == "read"
        return reads and oracle(identities, user, "operate", "broker", "")
    about = [
        rule.effect
        for rule in identities.rules
        if rule.subject in ("everyone", f"user:{user}", *(f"team:{team}" for team in known.teams))
        and right in rule.rights
        and rule.resource == resource
        and re.fullmatch(".*".join(map(re.escape, rule.pattern.split("*"))), name, re.DOTALL)
    ]
    return "allow" in about and "deny" not in about
