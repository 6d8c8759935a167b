// Package sdktest waits for conditions in tests of the SDK and of the modules
// that are built on it.
package sdktest

import (
	"testing"
	"time"
)

// Enough is the time that Eventually allows. A condition that takes so long on a
// loaded machine is not met on any.
const Enough = 2 * time.Minute

// Holds polls ok until it returns true or limit has passed, and reports whether
// ok returned true. The pauses grow from 1 ms to 50 ms.
func Holds(limit time.Duration, ok func() bool) bool {
	end := time.Now().Add(limit)
	for pause := time.Millisecond; !ok(); pause = min(pause*5/4, 50*time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
		time.Sleep(pause)
	}
	return true
}

// Within waits until ok returns true. It ends the test if that takes longer than
// limit, or if the test has failed meanwhile. what names the condition.
func Within(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	if !Holds(limit, func() bool { return t.Failed() || ok() }) {
		t.Fatalf("not within %v: %s", limit, what)
	}
	if t.Failed() {
		t.FailNow()
	}
}

// Eventually is Within with the limit Enough.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	Within(t, Enough, what, ok)
}
