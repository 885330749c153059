"""Files of a host, below a root."""

CONFIG = "etc/containerd/config.toml"
"Where containerd's configuration is by default."
CONTAINERD = "containerd://2.1.4"
"What a node says of its runtime."


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
