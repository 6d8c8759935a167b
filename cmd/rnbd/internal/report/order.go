package report

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

// Filter returns the objects that fit all conditions FIELD=PATTERN or
// FIELD!=PATTERN. A pattern is compared with the field as CSV prints it, by the
// rules of path.Match with "/" as any other letter.
func Filter[T any](fields []Field[T], objects []T, conditions []string) ([]T, error) {
	for _, c := range conditions {
		name, pattern, ok := strings.Cut(c, "=")
		name, not := strings.CutSuffix(name, "!")
		if !ok || name == "" {
			return nil, fmt.Errorf("filter %q: write FIELD=PATTERN or FIELD!=PATTERN", c)
		}
		f, err := fieldOf(fields, name)
		if err != nil {
			return nil, fmt.Errorf("filter %q: %w", c, err)
		}
		pattern = flat(pattern)
		if _, err := path.Match(pattern, ""); err != nil {
			return nil, fmt.Errorf("filter %q: %w", c, err)
		}
		objects = slices.DeleteFunc(slices.Clone(objects), func(o T) bool {
			s, _ := plain(f.Get(o), 0)
			fits, _ := path.Match(pattern, flat(s))
			return fits == not
		})
	}
	return objects, nil
}

// flat replaces the separators that path.Match treats apart.
func flat(s string) string { return strings.ReplaceAll(s, "/", "\x00") }

// Sort returns the objects in the order of a field; "-" before its name turns the
// order round. Numbers are ordered by size. An empty name leaves them as they are.
func Sort[T any](fields []Field[T], objects []T, by string) ([]T, error) {
	if by == "" {
		return objects, nil
	}
	name, down := strings.CutPrefix(by, "-")
	f, err := fieldOf(fields, name)
	if err != nil {
		return nil, fmt.Errorf("sort: %w", err)
	}
	objects = slices.Clone(objects)
	slices.SortStableFunc(objects, func(a, b T) int {
		order := compare(f.Get(a), f.Get(b))
		if down {
			return -order
		}
		return order
	})
	return objects, nil
}

func fieldOf[T any](fields []Field[T], name string) (Field[T], error) {
	var names []string
	for _, f := range fields {
		if f.Name == name {
			return f, nil
		}
		names = append(names, f.Name)
	}
	return Field[T]{}, fmt.Errorf("there is no field %q%s", name, spell.Suggest(name, names))
}

func compare(a, b any) int {
	x, _ := plain(a, 0)
	y, _ := plain(b, 0)
	if number(a) && number(b) {
		m, _ := strconv.ParseFloat(x, 64)
		n, _ := strconv.ParseFloat(y, 64)
		return cmp.Compare(m, n)
	}
	return strings.Compare(x, y)
}
