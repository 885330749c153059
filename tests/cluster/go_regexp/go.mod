module rackloom.test/cluster/go-regexp

go 1.25.0
