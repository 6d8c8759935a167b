package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// loadConfig reads a YAML file into the struct that the command's flags are
// bound to. Flags given on the command line win. A key that the struct does
// not have is an error with its line.
func loadConfig(cmd *cobra.Command, path string, into any) error {
	if path == "" {
		return nil
	}
	given := givenFlags(cmd)
	text, err := os.ReadFile(path)
	if err != nil {
		return usageError{fmt.Errorf("configuration: %w", err)}
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(into); err != nil && !errors.Is(err, io.EOF) {
		return usageError{fmt.Errorf("configuration %s: %w", path, tidyYAML(err))}
	}
	if err := dec.Decode(new(any)); err != io.EOF {
		return usageError{fmt.Errorf("configuration %s: there is more than one document, or one is broken", path)}
	}
	for _, restore := range given {
		if err := restore(); err != nil {
			return usageError{err}
		}
	}
	return nil
}

// givenFlags remembers the flags of the command line, to set them again over
// what the file says.
func givenFlags(cmd *cobra.Command) (restore []func() error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values := append([]string(nil), list.GetSlice()...)
			restore = append(restore, func() error { return list.Replace(values) })
			return
		}
		value := f.Value.String()
		restore = append(restore, func() error { return f.Value.Set(value) })
	})
	return restore
}

// tidyYAML puts what the decoder found on one line.
func tidyYAML(err error) error {
	var types *yaml.TypeError
	if errors.As(err, &types) {
		lines := slices.Clone(types.Errors)
		for i, l := range lines { // "line 3: field x not found in type main.options"
			if before, _, ok := strings.Cut(l, " not found in type "); ok {
				lines[i] = strings.Replace(before, ": field ", ": unknown key ", 1)
			}
			lines[i], _, _ = strings.Cut(lines[i], " into main.")
		}
		return errors.New(strings.Join(lines, "; "))
	}
	return err
}
