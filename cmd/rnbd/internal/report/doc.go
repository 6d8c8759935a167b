// Package report prints objects by their fields: as tables for people, as
// CSV, JSON, XML or YAML for programs.
//
// The fields of an object are listed once, in a list of Fields. Select
// chooses among them in the words of a command line, Build reads the chosen
// ones of some objects into a Table, and Print writes it. The type of a cell
// is its meaning: Bytes and Sectors get units, they and Counts are summed up,
// a nil is a value that the object does not have.
package report
