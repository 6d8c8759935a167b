module github.com/rnbd-go/rnbd/cmd/rnbd-net

go 1.26.0

require (
	github.com/rnbd-go/rnbd/modules/bond v0.1.0
	github.com/rnbd-go/rnbd/modules/ipoib v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-sdk v0.1.0
	github.com/rnbd-go/rnbd/modules/rtrs v0.1.0
	github.com/spf13/cobra v1.10.2
	github.com/spf13/pflag v1.0.9
	golang.org/x/sys v0.49.0
)

require (
	github.com/hanwen/go-fuse/v2 v2.12.1 // indirect
	github.com/inconshreveable/mousetrap v1.1.0 // indirect
)
