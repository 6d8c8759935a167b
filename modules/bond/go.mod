module github.com/rnbd-go/rnbd/modules/bond

go 1.26.0
