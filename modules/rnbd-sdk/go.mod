module github.com/rnbd-go/rnbd/modules/rnbd-sdk

go 1.26

require (
	golang.org/x/sys v0.49.0
	github.com/hashicorp/go-plugin v1.8.0
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
	github.com/hashicorp/go-hclog v1.6.3
)
