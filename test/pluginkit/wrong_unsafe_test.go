package pluginkit

import (
	"reflect"
	"unsafe"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// completerOf returns the queue's end of the ring, which package plugin hides from authors.
func completerOf(q *plugin.Queue) *shm.Completer {
	f := reflect.ValueOf(q).Elem().FieldByName("c")
	return *(**shm.Completer)(unsafe.Pointer(f.UnsafeAddr()))
}

// requestsOf returns the requests of the ring where the host may still change them.
func requestsOf(c *shm.Completer) []shm.SQE {
	f := reflect.ValueOf(c).Elem().FieldByName("v").FieldByName("sqes")
	return *(*[]shm.SQE)(unsafe.Pointer(f.UnsafeAddr()))
}
