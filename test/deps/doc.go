// Package deps holds the rules of imports between packages, and of uses between the
// files of a package, as tests.
package deps
