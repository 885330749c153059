"""The site once a plan holds its trays."""

from rackloom.claim.place.values import Gang, Hold, Plan, Site


def reserved(site: Site, gang: Gang, plan: Plan) -> Site:
    """The site with the members seated and the spare trays kept.

    Trays with claimed devices are taken whole, those without GPUs too: what is left of their NICs was not
    asked.
    """
    whole = {tray.name: tray.gpus for tray in site.trays}
    groups = {group.name: group for group in gang.groups}
    gpus = dict.fromkeys((*plan.trays, *plan.spares), 0)
    for seat in plan.seats:
        group = groups[seat.group]
        if gang.exclusive or group.devices is not None:
            gpus[seat.tray] = whole[seat.tray]
        else:
            gpus[seat.tray] = min(gpus[seat.tray] + group.gpus, whole[seat.tray])
    gpus |= {spare: whole[spare] for spare in plan.spares}
    taken = {*plan.spares, *(seat.tray for seat in plan.seats if groups[seat.group].devices is not None)}
    linked = {seat.tray for seat in plan.seats if groups[seat.group].has_channel}
    mine = tuple(
        Hold(
            owner=gang.name,
            tray=tray,
            gpus=count,
            priority=gang.priority,
            is_whole=tray in taken,
            channel=tray in linked,
        )
        for tray, count in gpus.items()
        if count or tray in taken or tray in linked
    )
    return Site(site.trays, (*site.holds, *mine))
