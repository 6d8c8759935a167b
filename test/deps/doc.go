// Package deps holds the rules of imports between packages, as a test.
package deps
