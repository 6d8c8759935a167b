module github.com/rnbd-go/rnbd/cmd/rnbd

go 1.26.0

require (
	github.com/rnbd-go/rnbd/modules/rtrs v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-sdk v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-server v0.1.0
	github.com/rnbd-go/rnbd/modules/rnbd-client v0.1.0
	github.com/spf13/cobra v1.10.2
	go.yaml.in/yaml/v3 v3.0.6
	golang.org/x/sys v0.49.0
)
