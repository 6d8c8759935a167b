module github.com/rnbd-go/rnbd/modules/ipoib

go 1.26.0
