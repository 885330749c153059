"""The Node Resource Interface (NRI) of container runtimes: a plugin that hears of pod sandboxes."""
