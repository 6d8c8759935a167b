module github.com/rnbd-go/rnbd/modules/ipoib

go 1.26.0

require (
	github.com/rnbd-go/rnbd/modules/rtrs v0.1.0
	golang.org/x/sys v0.49.0
)
