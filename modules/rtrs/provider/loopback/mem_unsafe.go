package loopback

import "unsafe"

// containsSlice reports whether part, not empty, lies within whole.
func containsSlice(whole, part []byte) bool {
	w := uintptr(unsafe.Pointer(unsafe.SliceData(whole)))
	p := uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	return p >= w && p-w <= uintptr(len(whole)) && uintptr(len(part)) <= uintptr(len(whole))-(p-w)
}
