// Package top draws the screens of rnbd top: devices, paths and events, with the
// changes between two samples of the daemons.
//
// It is pure: Screen makes lines of text of two Samples and a State, Decode makes
// Keys of bytes, and State.Press changes the State. It opens nothing and waits for
// nothing. Asking the daemons and writing to the terminal is done by its user.
package top
