// Package config reads YAML files into structs, strictly, and describes the
// structs as a JSON Schema. An error names file, line and column; a key that the
// struct does not have is an error with the known key that is nearest.
//
// The keys of a struct are the yaml tags of its fields; structs tagged inline
// belong to the one around them, and the tag "-" leaves a field out.
package config
