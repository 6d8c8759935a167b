// Package audit writes records of who did what as lines of JSON.
//
// A record never waits for the place that it goes to: Log.Add puts it in a queue
// of a fixed length. When that is full, the record is dropped and counted, and the
// next one that is written says how many are missing before it.
package audit
