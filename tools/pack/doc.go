// Command pack makes packages of the files that make install has put into a folder:
// Debian packages, RPM packages, and an OCI image.
//
//	pack -stage FOLDER -source FOLDER -out FOLDER -version 0.1.0 -date 1700000000 [-programs FOLDER]
//
// The same input gives the same bytes: times are that of -date, owners are root,
// and entries are sorted. No root and no tool of a distribution is needed.
//
// The licences of the modules that programs are linked with go into the packages.
// They are found by the build information of the programs, in the module cache.
// The same information becomes a bill of materials (CycloneDX) for each program.
package main
