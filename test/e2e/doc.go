// Package e2e tests the whole system as users meet it: the real daemons and
// plugins as processes of this machine, real NBD clients, and the command line.
// RNBD_LONG=1 runs the long forms.
package e2e
