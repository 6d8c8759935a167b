module github.com/rnbd-go/rnbd/test

go 1.26.0

require (
	github.com/rnbd-go/rnbd/modules/rtrs v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-sdk v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-server v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-client v0.1.0
	golang.org/x/sys v0.49.0
	github.com/hanwen/go-fuse/v2 v2.12.1
)
