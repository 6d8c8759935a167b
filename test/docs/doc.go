// Package docs holds the tests that keep the documents true: functions, links,
// make targets, flags and examples that they name exist.
package docs
