// Package confine takes rights away from a process before it executes a plugin.
//
// A host does not execute a plugin itself. It executes a launcher: the
// host's own program with a hidden argument. The launcher reads a Profile, gives
// up everything that the profile does not allow, reports what the kernel granted,
// and executes the plugin. So a plugin cannot skip any of it, and a plugin in
// another language needs no code for it.
//
// Each measure is probed by applying it. Under Try a measure that the kernel or
// the user does not allow is reported and left out. Under Strict the plugin is not
// started then.
//
// The limits hold for the process of the plugin and for everything that it
// starts. They are not a proof against errors of the kernel.
//
// Threads: Exec locks the calling thread and works on it. It is the main
// function of the launcher and does not return.
package confine
