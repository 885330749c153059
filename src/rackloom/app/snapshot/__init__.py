"""Reads the records of `carve`, the objects of `claim` and saved transfers into one `SiteSnapshot`.

It lives in `app` because verbs never import each other. `assemble` is the entry. `fabric` and `records`
read the site's database, `cluster` and `devices` the Kubernetes objects. `cache` keeps the values that did
not change between two readings, `readers` open the database read-only, `background_examiner` runs the doctor
beside a service that reads often.
"""
