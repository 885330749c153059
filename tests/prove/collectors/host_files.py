"""Files of a host, below a root."""

CONFIG = "etc/containerd/config.toml"
"The default path of containerd's configuration."
CONTAINERD = "containerd://2.1.4"
"The runtime version that a node reports."


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
