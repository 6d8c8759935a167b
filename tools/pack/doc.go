// Command pack makes packages of what make install has put into a folder:
// Debian packages, RPM packages, and an OCI image.
//
//	pack -stage FOLDER -docs FOLDER -out FOLDER -version 0.1.0 -date 1700000000
//
// The same input gives the same bytes: times are that of -date, owners are root,
// and entries are sorted. No root and no tool of a distribution is needed.
package main
