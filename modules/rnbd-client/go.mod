module github.com/rnbd-go/rnbd/modules/rnbd-client

go 1.26.0

require (
	github.com/rnbd-go/rnbd/modules/rtrs v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-sdk v0.1.0
	golang.org/x/sys v0.49.0
	google.golang.org/grpc v1.85.0
)
