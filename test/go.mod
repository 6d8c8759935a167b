module github.com/rnbd-go/rnbd/test

go 1.26.0

require (
	github.com/hanwen/go-fuse/v2 v2.12.1
	github.com/rnbd-go/rnbd/modules/bond v0.1.0
	github.com/rnbd-go/rnbd/modules/ipoib v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-client v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-sdk v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-server v0.1.0
	github.com/rnbd-go/rnbd/modules/rtrs v0.1.0
	github.com/rogpeppe/go-internal v1.16.0
	golang.org/x/sys v0.49.0
	golang.zx2c4.com/wireguard v0.0.0-20260522210424-ecfc5a8d5446
	google.golang.org/grpc v1.85.0
)

require (
	github.com/elastic/go-seccomp-bpf v1.6.0 // indirect
	github.com/fatih/color v1.13.0 // indirect
	github.com/golang/protobuf v1.5.4 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/hashicorp/go-hclog v1.6.3 // indirect
	github.com/hashicorp/go-plugin v1.8.0 // indirect
	github.com/hashicorp/yamux v0.1.2 // indirect
	github.com/mattn/go-colorable v0.1.12 // indirect
	github.com/mattn/go-isatty v0.0.17 // indirect
	github.com/oklog/run v1.1.0 // indirect
	golang.org/x/crypto v0.58.0 // indirect
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	golang.org/x/tools v0.51.0 // indirect
	golang.zx2c4.com/wintun v0.0.0-20230126152724-0fa3db229ce2 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260817212433-ac3dfec99bb1 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)
