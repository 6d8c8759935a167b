// Package vuln has the tests of make vuln, which runs govulncheck on every program.
package vuln
