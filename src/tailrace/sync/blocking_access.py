"""Blocking administration of access."""

from __future__ import annotations

from tailrace.client.admin import access_admin
from tailrace.sync.blocking_wrapper import BlockingWrapper, blocking


class AccessAdmin(BlockingWrapper[access_admin.AccessAdmin]):
    """Say who may do what; see `tailrace.AccessAdmin`."""

    whoami = blocking(access_admin.AccessAdmin.whoami)
    check = blocking(access_admin.AccessAdmin.check)
    add_user = blocking(access_admin.AccessAdmin.add_user)
    alter_user = blocking(access_admin.AccessAdmin.alter_user)
    remove_user = blocking(access_admin.AccessAdmin.remove_user)
    list_users = blocking(access_admin.AccessAdmin.list_users)
    create_token = blocking(access_admin.AccessAdmin.create_token)
    list_tokens = blocking(access_admin.AccessAdmin.list_tokens)
    revoke_token = blocking(access_admin.AccessAdmin.revoke_token)
    add_rule = blocking(access_admin.AccessAdmin.add_rule)
    remove_rule = blocking(access_admin.AccessAdmin.remove_rule)
    list_rules = blocking(access_admin.AccessAdmin.list_rules)
    put_quota = blocking(access_admin.AccessAdmin.put_quota)
    remove_quota = blocking(access_admin.AccessAdmin.remove_quota)
    list_quotas = blocking(access_admin.AccessAdmin.list_quotas)
    add_tenant = blocking(access_admin.AccessAdmin.add_tenant)
    remove_tenant = blocking(access_admin.AccessAdmin.remove_tenant)
    list_tenants = blocking(access_admin.AccessAdmin.list_tenants)
