"""Parts of scenario files, for tests that write such files."""

HEAD = 'title = "t"\nseen = "s"\n'
CARVED = """
[[step]]
do = "make-logical-partition"
name = "lp"
[[step]]
do = "make-vpc"
name = "net"
logical-partition = "lp"
[[step]]
do = "make-instances"
group = "job"
vpc = "net"
count = 2
"""
READY = """
[[step]]
expect = "instances"
group = "job"
status = "Ready"
within = 60
"""
END = """
[[step]]
expect = "invariants"
within = 1
"""
